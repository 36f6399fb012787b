// Copies a plan's changes of the slots to their places on the device: a thread block per segment.

#include "vector.cuh"

extern "C" __global__ void scatter_segments(
    int* words,          // the slots' buffer
    const int* changes,  // header of 8 words, targets [n], sources [n], lengths [n], data
    int num_segments) {  // n
    wait_for_predecessors();
    release_successors();
    const int* table = changes + 8;
    const int* data = table + 3 * num_segments;
    int* target = words + table[blockIdx.x];
    const int* source = data + table[num_segments + blockIdx.x];
    const int length = table[2 * num_segments + blockIdx.x];
    for (int i = threadIdx.x; i < length; i += blockDim.x) target[i] = source[i];
}
