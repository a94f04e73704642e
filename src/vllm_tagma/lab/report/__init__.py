"""``tagma report``: result files of ``tagma bench host`` as one HTML page and one Markdown file.

``content.py`` turns results into a document, ``charts.py`` draws, ``html_page.py`` and
``markdown.py`` render. Figures come from the JSON alone.
"""
