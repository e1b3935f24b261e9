"""The live page: a process of its own, which reads a run folder and shows what is in it"""
