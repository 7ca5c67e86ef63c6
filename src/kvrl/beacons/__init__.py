"""Breadcrumbs (arXiv 2510.13797): a beacon token's KV entry takes the place of the window before it."""
