"""``tagma replay``: vLLM's own scheduler over a trace, with its manager and with ours.

No model and no GPU: the trace gives lengths, times and which content prompts share, and the
model's outputs are made up. Reading order: ``trace.py`` (what a request is), ``formats.py`` and
``loads.py`` (where requests come from), ``drive.py`` (the step loop), ``probe.py`` and
``counters.py`` (what is counted), ``replay_command.py`` (the options).
"""
