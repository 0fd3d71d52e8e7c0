"""What one worker does: run its list of operations over weight versions, channels and replicas.

Nothing here starts a process or knows how the workers were started; see ``launcher/launch.py``.
"""
