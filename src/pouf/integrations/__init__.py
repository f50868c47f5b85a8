"""Integrations with other tools. Each is imported on demand and needs an extra, which its error names if missing."""
