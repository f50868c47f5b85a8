"""The paper's experiments: its tasks as data, its protocol, its tables."""
