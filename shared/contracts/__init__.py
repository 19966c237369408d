"""What Thaw's processes say to each other: subjects, messages, deadlines.

Nothing of this lives anywhere else.
"""
