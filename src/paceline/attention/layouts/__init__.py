"""Layouts: the few shapes of metadata that kernel interfaces want, each derived in one place.

A backend picks a layout and calls its kernel.  A layout reads a StepView and writes its own
buffers; it knows no backend, no model and no mode.
"""
