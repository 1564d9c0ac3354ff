"""Draw: one palette, the charts of pages, the pictures in PNG files."""
