"""Real SGLang engines, fed by a real server. They run in an environment of their own: `make test-sglang`.

SGLang starts about a minute; each module of these tests starts as few engines as it can.
"""
