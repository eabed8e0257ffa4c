"""See docs/concepts/architecture.md, section 4."""
