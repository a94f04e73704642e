"""``tagma bench serve``: the paged and the tagma backend of one server, end to end, in turns.

``serve_command.py`` is the sub-command, ``serve_settings.py`` and ``profiles.py`` say what is
measured, ``preflight.py`` what must be there, ``serve_plan.py`` in which order; ``series.py`` runs
the servers and clients, ``record.py`` is the JSON, ``serve_compare.py`` the arithmetic. The
page is made by ``report/``.
"""
