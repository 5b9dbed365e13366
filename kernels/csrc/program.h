// Operations that a recorded program can call. Contract: kernels/step/program.py.
#pragma once

#include <type_traits>
#include <utility>

#include "lanes.h"

union Word {
    int64_t number;
    float real;
    void* address;
};

template <class T>
INLINE T from_word(const Word& word) {
    if constexpr (std::is_floating_point_v<T>)
        return word.real;
    else if constexpr (std::is_pointer_v<T>)
        return (T)word.address;
    else
        return (T)word.number;
}
template <class... A, size_t... I>
static void call_words(void (*op)(A...), const Word* words, std::index_sequence<I...>) {
    op(from_word<A>(words[I])...);
}
template <class... A>
static void call_words(void (*op)(A...), const Word* words) {
    call_words(op, words, std::index_sequence_for<A...>{});
}
template <class... A>
constexpr int64_t arity(void (*)(A...)) {
    return sizeof...(A);
}

// Makes an exported operation callable from programs.
#define CALLABLE(name)                                               \
    EXPORT void name##_call(const Word* words) { call_words(name, words); } \
    EXPORT int64_t name##_arity() { return arity(name); }
