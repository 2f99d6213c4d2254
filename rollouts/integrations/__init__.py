"""Integrations: one trainer or agent framework per folder or file, imported only when it is used."""
