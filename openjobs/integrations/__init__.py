"""Agent frameworks: each module needs the extra of its name and imports it; this one imports nothing."""
