"""Finds what keeps a program out of CUDA graphs, what that costs, and what to change first."""

from torch_overlay.analysis.doctor.diagnose import diagnose
from torch_overlay.analysis.doctor.diagnosis import Diagnosis, Finding, Trial, Work


__all__ = ["Diagnosis", "Finding", "Trial", "Work", "diagnose"]
