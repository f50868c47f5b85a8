"""A run behind a page and a JSON API: `pouf serve`. It needs the extra serve."""
