"""Roles as SPMD code for one rank; their methods are marked with ``@register``."""
