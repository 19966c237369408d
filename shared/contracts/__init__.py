"""The contracts between Thaw's processes: subjects, messages, deadlines.

Nothing of this lives anywhere else.
"""
