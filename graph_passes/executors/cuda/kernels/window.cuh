// Sizes and geometry of a pooling.
#pragma once

struct Window {
    int height, width;  // size of the input
    int out_height, out_width;  // size of the output
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
};
