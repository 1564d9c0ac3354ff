"""The lessons: a folder each, with lesson.toml and check.py."""
