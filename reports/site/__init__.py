"""The report of the whole site: totals, tables, pictures, and the page."""
