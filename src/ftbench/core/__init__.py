"""Facts and arithmetic. The modules do not import torch and read only the data files that ftbench ships."""
