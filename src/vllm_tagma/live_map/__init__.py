"""``tagma map``: the pool of a running server, drawn in the terminal.

``source.py`` gets it from ``/metrics``, ``drawing.py`` turns it into text, ``command.py`` is the
sub-command.
"""
