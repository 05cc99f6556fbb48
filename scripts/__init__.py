"""The jobs of the command line, one file each: ``specjax NAME`` runs ``NAME.py``."""
