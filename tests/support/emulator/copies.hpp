// Asynchronous copies: tensor copies with mbarriers complete some time after their start, copies of 16 bytes when they
// are waited for.
#pragma once

#include "block.hpp"

namespace emulator {

inline void store(unsigned address, unsigned word) { memcpy(at(address, 4), &word, 4); }
inline Barrier& barrier(unsigned address) {
    auto found = block->barriers.find(address);
    if (found == block->barriers.end()) fail("no barrier at this address");
    return found->second;
}
inline void settle(Barrier& own) {
    if (own.pending < 0) fail("more arrivals than the barrier expects");
    if (own.pending == 0 && own.bytes == 0) own.phase++, own.pending = own.expected, block->progress++;
}
inline void barrier_init(unsigned address, int arrivals) { block->barriers[address] = {arrivals, arrivals}; }
inline void barrier_arrive(unsigned address) {
    Barrier& own = barrier(address);
    own.pending--;
    settle(own);
}
inline void barrier_expect(unsigned address, int bytes) {
    barrier(address).bytes += bytes;
    barrier_arrive(address);
}
inline void barrier_try_wait(unsigned& done, unsigned address, unsigned parity) {
    done = (barrier(address).phase & 1) != parity;
    if (!done) yield("barrier ", address - kSharedBase);
}
inline void copy_tensor(unsigned target, const void* map, int column, int row, int plane, unsigned full) {
    block->copies.push_back({target, static_cast<const EncodedMap*>(map), {column, row, plane}, full});
}
inline void copy_bytes(unsigned target, const void* source, int bytes, unsigned full) {
    if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) fail("a copy of bytes at odd places");
    block->copies.push_back({target, nullptr, {}, full, source, static_cast<unsigned>(bytes)});
}
inline void land_bytes(const Copy& copy) {
    memcpy(at(copy.target, copy.bytes), copy.source, copy.bytes);
    Barrier& full = barrier(copy.barrier);
    full.bytes -= copy.bytes;
    settle(full);
    block->progress++;
}
inline void land(const Copy& copy) {
    if (!copy.map) return land_bytes(copy);
    const EncodedMap& map = *copy.map;
    unsigned offset = 0, bytes = map.element_bytes;
    for (int p = 0; p < map.box[2]; p++)
        for (int r = 0; r < map.box[1]; r++)
            for (int c = 0; c < map.box[0]; c++, offset += bytes) {
                int64_t place[3] = {copy.start[0] + c, copy.start[1] + r, copy.start[2] + p};
                bool inside = true;
                for (int i = 0; i < 3; i++) inside &= place[i] >= 0 && place[i] < map.sizes[i];
                unsigned to = copy.target + offset;
                char* target = at(map.swizzles ? swizzled(to) : to, bytes);
                if (inside) {
                    int64_t from = place[0] * bytes + place[1] * map.strides[0] + place[2] * map.strides[1];
                    memcpy(target, reinterpret_cast<const char*>(map.address) + from, bytes);
                } else {
                    memset(target, 0, bytes);
                }
            }
    Barrier& full = barrier(copy.barrier);
    full.bytes -= offset;
    settle(full);
    block->progress++;
}

inline void copy_small(unsigned target, const void* source, int valid_bytes) {
    current->open_copies.push_back({target, source, valid_bytes});
}
inline void commit_copies() {
    current->copy_groups.push_back(std::move(current->open_copies));
    current->open_copies.clear();
}
inline void land(const std::vector<SmallCopy>& copies) {
    for (const SmallCopy& copy : copies) {
        char* target = at(copy.target, 16);
        memset(target, 0, 16);
        if (copy.valid_bytes) memcpy(target, copy.source, copy.valid_bytes);
    }
}
inline void wait_copies(int pending) {
    for (; static_cast<int>(current->copy_groups.size()) > pending; current->copy_groups.pop_front()) {
        land(current->copy_groups.front());
    }
}
inline void arrive_after_copies(unsigned address) {
    block->arrivals.push_back({std::move(current->open_copies), address});
    current->open_copies.clear();
}
inline void land(const LateArrival& arrival) {
    land(arrival.copies);
    barrier_arrive(arrival.barrier);
    block->progress++;
}

}  // namespace emulator
