"""Audits of dumps that other systems write: which laws hold, which are broken, and which cannot be judged.

A reader of a format (``readers/``) makes rows (``rows.py``), and one judge (``judge.py``) applies to them the laws of
stored runs. Packages add formats by entry points in the group ``rollouts.audit_readers``.
"""

from rollouts.audit.judge import AuditReport, audit
from rollouts.audit.model_tokens import ModelTokens
from rollouts.audit.readers import FORMATS, names, reader_of
from rollouts.audit.rows import CHECKS, AuditedRow, Finding, Reader
from rollouts.audit.weights import Weights

__all__ = [
    "CHECKS",
    "FORMATS",
    "AuditReport",
    "AuditedRow",
    "Finding",
    "ModelTokens",
    "Reader",
    "Weights",
    "audit",
    "names",
    "reader_of",
]
