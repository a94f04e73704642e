"""Every place where this package leans on vLLM's internals, as data, and the check that they fit.

A seam names what is touched, how, why, what it looked like in each release this package knows,
and when the seam can go. Start-up checks the seams of the process it runs in and stops on the
first that does not fit; ``tagma doctor`` and the tests check all of them, the latter for each
known release. The checks read vLLM's source files (``signatures.py``), so they are cheap and
never import a worker into an API server.

``seam.py`` is the form of an entry, ``seam_table.py`` joins the entries, ``seam_check.py`` checks.
"""

from __future__ import annotations

from vllm_tagma.integration.seams.seam import ROOMS, Room, Seam
from vllm_tagma.integration.seams.seam_check import check_seams, require_seams
from vllm_tagma.integration.seams.seam_table import SEAMS

__all__ = ["ROOMS", "SEAMS", "Room", "Seam", "check_seams", "require_seams"]
