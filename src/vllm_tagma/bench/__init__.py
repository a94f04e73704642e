"""``tagma bench host``: what the host side of the backend costs, against vLLM's own.

``command.py`` is the sub-command, ``plan.py`` the list of scenarios, ``timing.py`` the clock,
``schema.py`` the JSON; one module per family of scenarios.
"""
