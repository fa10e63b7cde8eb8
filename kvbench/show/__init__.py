"""Tables, figures and pages from stored rows. Neither torch nor the engine is ever loaded here.

In: run folders. Out: text, PNG, SVG, CSV, HTML.
May import: contract, store, stats.
"""
