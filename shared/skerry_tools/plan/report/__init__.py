"""A report as one page, and its pictures and tables as files."""
