"""What `make gpu-first` needs on a machine where nothing can be installed from outside."""
