"""Parts of `bench.updates`: versions of a model, engines that load them, and chats whose answers are compared."""
