"""The snippets of the guide that users come with run as it writes them, against the scripted endpoint."""
