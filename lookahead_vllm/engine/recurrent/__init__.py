"""The states of recurrent layers at the nodes of trees, and the kernels for each device."""
