"""Tool calls in the text of a response: a state machine over characters for each family of models.

The state depends on the text so far and on nothing else: any division of a text into parts gives
the same deltas when they are joined. So a response that another engine continues, or that is
replayed, has the same calls.
"""
