// Stands for CUDA's header of that name.
#pragma once

#include "../device.h"
