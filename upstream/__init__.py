"""The plugin's change as native edits to SGLang: a patch series that is generated, applied and tested, never kept by hand.

``wheel`` lays out the pinned release as upstream's repository does, ``edit`` changes source by its structure, ``series``
says what to change, one folder a commit, and ``build`` makes the patches.
"""
