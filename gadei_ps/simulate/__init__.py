"""Simulates synchronization models and groups of replicas in virtual time.

The models are the objects that the server drives; the rules of groups are in gadei_ps/groups/.
"""
