"""``tagma map``: the pool of a running server, drawn in the terminal.

``map_source.py`` gets it from ``/metrics``, ``map_drawing.py`` turns it into text,
``map_command.py`` is the sub-command.
"""
