"""The host side of a batch job."""
