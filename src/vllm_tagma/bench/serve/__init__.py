"""``tagma bench serve``: the paged and the tagma backend of one server, end to end, in turns.

``command.py`` is the sub-command, ``settings.py`` and ``profiles.py`` say what is measured,
``preflight.py`` what must be there, ``plan.py`` in which order; ``series.py`` runs the servers and
clients, ``record.py`` is the JSON, ``compare.py`` the arithmetic. The page is made by ``report/``.
"""
