"""Model families: the interface of a plug-in, the choice of the family for a checkpoint, and `transformers`' towers."""
