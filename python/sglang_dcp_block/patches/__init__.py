"""What the plugin changes in SGLang: named patch points, and thin adapters that carry them out.

fingerprint   the source text of an upstream definition, hashed without importing it
register      PatchPoint, and arming: check -> apply -> verify, or refuse
points        the list of all patch points
active        the layout this process is armed with
launch        the flag, start-up resolution, arming, agreement of ranks
write_door, reads, lengths, triton_gqa
              one adapter a subsystem
"""
