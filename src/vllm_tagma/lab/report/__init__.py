"""``tagma report``: result files of ``tagma bench`` as one HTML page and one Markdown file.

``content.py``, ``serve_content.py`` and ``transfer_content.py`` turn results into a document,
``charts.py`` draws, ``html_page.py`` and ``markdown.py`` render. Figures come from the JSON alone.
"""
