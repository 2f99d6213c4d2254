"""Stored runs: the folder and the journal; reading, checking, replaying, rescoring and exporting them."""
