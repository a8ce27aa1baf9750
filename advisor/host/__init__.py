"""Host memory and CPUs: the options to ask for, by the evidence and the calibrated bound of advisor/memory."""

__all__ = ["options"]
