"""Everything that touches vLLM by patch, subclass or swap. ``seams.py`` lists each with its why."""
