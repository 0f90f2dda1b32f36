"""The site of a store: all cells on one page, and a page a cell. It needs no server and no network."""

from quantkit.nightly.page.site import Written, write

__all__ = ["Written", "write"]
