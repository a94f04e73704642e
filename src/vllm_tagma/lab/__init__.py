"""The laboratory: what measures, replays, draws and reports. Serving imports nothing of it.

``bench/`` is ``tagma bench host``, ``bench_serve/`` is ``tagma bench serve``, ``replay/`` is
``tagma replay``, ``pool_map/`` is ``tagma map``, ``report/`` is ``tagma report`` and
``kernel_check/`` is ``make gpu-check``. ``lab_commands.py`` hands their sub-commands to
``vllm_tagma.cli``, the only module outside that imports from here, and only once one is asked for.
"""
