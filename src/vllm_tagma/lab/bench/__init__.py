"""``tagma bench host``: what the host side of the backend costs, against vLLM's own.

``bench_command.py`` is the sub-command, ``bench_plan.py`` the list of scenarios,
``bench_timing.py`` the clock, ``schema.py`` the JSON; one module per family of scenarios.
"""
