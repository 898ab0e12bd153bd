"""Views of running and ended jobs: `gadei-ps top` and `gadei-ps dashboard`.

They only read, except for actions, which run the code of the commands. No job depends on them.
"""
