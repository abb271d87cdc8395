/* A DequantizePacked backend for the conformance suite's command protocol: argv is MODEL OUTPUT [INPUT...].
 *
 * It reads the few protobuf fields that it needs by itself and decodes with ggml's compiled library. It knows models of
 * one DequantizePacked node between one input and one output, all formats but Q8_1, and FLOAT.
 * Exit status: 0 answered, 3 refused, 4 not supported.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REFUSED = 3, UNSUPPORTED = 4 };

static void end(int status, const char *why) {
  fprintf(stderr, "%s\n", why);
  exit(status);
}

typedef struct { const uint8_t *at, *end; } bytes;

static bytes read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) end(1, "cannot open a file");
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  uint8_t *data = malloc(size + 1);
  if (!data || fread(data, 1, size, file) != (size_t)size) end(1, "cannot read a file");
  fclose(file);
  return (bytes){data, data + size};
}

static uint64_t varint(bytes *in) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (in->at == in->end) end(REFUSED, "the protobuf ends early");
    uint8_t byte = *in->at++;
    value |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) return value;
  }
  end(REFUSED, "a varint is too long");
  return 0;
}

/* The next field: its number, and its contents or its value. Returns 0 at the end. */
static int next(bytes *in, int *number, bytes *contents, uint64_t *value) {
  if (in->at == in->end) return 0;
  uint64_t key = varint(in);
  *number = (int)(key >> 3);
  *contents = (bytes){in->at, in->at};
  *value = 0;
  switch (key & 7) {
    case 0: *value = varint(in); return 1;
    case 1: case 5: {
      int size = (key & 7) == 1 ? 8 : 4;
      if (in->end - in->at < size) end(REFUSED, "the protobuf ends early");
      in->at += size;
      return 1;
    }
    case 2: {
      uint64_t size = varint(in);
      if (size > (uint64_t)(in->end - in->at)) end(REFUSED, "the protobuf ends early");
      *contents = (bytes){in->at, in->at + size};
      in->at += size;
      return 1;
    }
  }
  end(REFUSED, "a wire type is unknown");
  return 0;
}

static int is(bytes text, const char *wanted) {
  size_t size = text.end - text.at;
  return size == strlen(wanted) && !memcmp(text.at, wanted, size);
}

/* The formats: name of ggml's function, elements and bytes per block. */
static const struct { const char *identifier, *function; int elements, bytes; } FORMATS[] = {
  {"gguf:q4_0", "q4_0", 32, 18},       {"gguf:q4_1", "q4_1", 32, 20},     {"gguf:q5_0", "q5_0", 32, 22},
  {"gguf:q5_1", "q5_1", 32, 24},       {"gguf:q8_0", "q8_0", 32, 34},     {"gguf:q2_k", "q2_K", 256, 84},
  {"gguf:q3_k", "q3_K", 256, 110},     {"gguf:q4_k", "q4_K", 256, 144},   {"gguf:q5_k", "q5_K", 256, 176},
  {"gguf:q6_k", "q6_K", 256, 210},     {"gguf:q8_k", "q8_K", 256, 292},   {"gguf:iq2_xxs", "iq2_xxs", 256, 66},
  {"gguf:iq2_xs", "iq2_xs", 256, 74},  {"gguf:iq3_xxs", "iq3_xxs", 256, 98}, {"gguf:iq1_s", "iq1_s", 256, 50},
  {"gguf:iq4_nl", "iq4_nl", 32, 18},   {"gguf:iq3_s", "iq3_s", 256, 110}, {"gguf:iq2_s", "iq2_s", 256, 82},
  {"gguf:iq4_xs", "iq4_xs", 256, 136}, {"gguf:iq1_m", "iq1_m", 256, 56},  {"gguf:tq1_0", "tq1_0", 256, 54},
  {"gguf:tq2_0", "tq2_0", 256, 66},    {"gguf:mxfp4", "mxfp4", 32, 17},   {"gguf:nvfp4", "nvfp4", 64, 36},
  {"gguf:q1_0", "q1_0", 128, 18},      {"gguf:q2_0", "q2_0", 64, 18},
};

static void put_varint(FILE *out, uint64_t value) {
  for (; value > 127; value >>= 7) fputc((int)(value & 127) | 128, out);
  fputc((int)value, out);
}

int main(int argc, char **argv) {
  if (argc < 3) end(1, "usage: ggml_backend MODEL OUTPUT [INPUT...]");
  bytes in = read_file(argv[1]), contents, graph = {0, 0}, node = {0, 0};
  int number, nodes = 0, functions = 0, initializers = 0;
  uint64_t value;
  while (next(&in, &number, &contents, &value)) {
    if (number == 7) graph = contents;   /* ModelProto.graph */
    if (number == 25) functions++;       /* ModelProto.functions */
  }
  for (in = graph; next(&in, &number, &contents, &value);) {
    if (number == 1) node = contents, nodes++; /* GraphProto.node */
    if (number == 5) initializers++;           /* GraphProto.initializer */
  }
  if (nodes != 1 || functions) end(UNSUPPORTED, "only models of one node are supported");

  bytes format = {0, 0};
  int64_t dims[64], inputs = 0, outputs = 0, rank = -1, output_dtype = 1;
  for (in = node; next(&in, &number, &contents, &value);) {
    if (number == 1) inputs += contents.at != contents.end; /* NodeProto.input */
    if (number == 2) outputs++;                             /* NodeProto.output */
    if (number == 4 && !is(contents, "DequantizePacked")) end(UNSUPPORTED, "only DequantizePacked is supported");
    if (number != 5) continue; /* NodeProto.attribute */
    bytes attribute = contents, name = {0, 0}, s = {0, 0};
    uint64_t i = 0, type = 0;
    int64_t ints[64], count = 0;
    while (next(&attribute, &number, &contents, &value)) {
      if (number == 1) name = contents;
      if (number == 3) i = value;
      if (number == 4) s = contents;
      if (number == 20) type = value;
      if (number == 8) { /* ints, packed or not */
        if (contents.at == contents.end && count < 64) ints[count++] = (int64_t)value;
        while (contents.at != contents.end && count < 64) ints[count++] = (int64_t)varint(&contents);
      }
    }
    if (is(name, "format") && type == 3 && !format.at) format = s;
    else if (is(name, "shape") && type == 7 && rank < 0) memcpy(dims, ints, sizeof ints), rank = count;
    else if (is(name, "output_dtype") && type == 2) output_dtype = (int64_t)i;
    else end(REFUSED, "an attribute is unknown, given twice, or of the wrong type");
  }
  if (inputs != 1 || outputs != 1) end(REFUSED, "the node must have one input and one output");
  if (!format.at || rank < 1) end(REFUSED, "format and shape must be given, the shape with a dimension");
  if (output_dtype != 1) {
    int other = output_dtype == 10 || output_dtype == 11 || output_dtype == 16;
    end(other ? UNSUPPORTED : REFUSED, "only FLOAT is supported");
  }
  if (is(format, "gguf:q8_1")) end(UNSUPPORTED, "Q8_1 is not supported");
  int f = -1, known = sizeof FORMATS / sizeof *FORMATS;
  for (int k = 0; k < known; k++)
    if (is(format, FORMATS[k].identifier)) f = k;
  if (f < 0) end(REFUSED, "the format is unknown");
  if (dims[rank - 1] % FORMATS[f].elements) end(REFUSED, "the last dimension is no multiple of the block");
  int64_t elements = 1, empty = 0;
  for (int d = 0; d < rank; d++) {
    if (dims[d] < 0) end(REFUSED, "a dimension is negative");
    empty |= !dims[d];
  }
  for (int d = 0; d < rank && !empty; d++)
    if (__builtin_mul_overflow(elements, dims[d], &elements)) end(REFUSED, "the shape is too large");
  if (empty) elements = 0;
  int64_t size;
  if (__builtin_mul_overflow(elements / FORMATS[f].elements, (int64_t)FORMATS[f].bytes, &size))
    end(REFUSED, "the shape is too large");

  /* The payload: an input file, or the initializer. */
  bytes tensor = {0, 0}, raw = {0, 0};
  if (argc > 3) tensor = read_file(argv[3]);
  else if (initializers == 1) {
    for (in = graph; next(&in, &number, &contents, &value);)
      if (number == 5) tensor = contents;
  } else end(UNSUPPORTED, "there is no input file and no initializer");
  int64_t data_type = 0, payload_rank = 0;
  while (next(&tensor, &number, &contents, &value)) {
    if (number == 1) { /* TensorProto.dims, packed or not */
      if (contents.at == contents.end) payload_rank++;
      while (contents.at != contents.end) varint(&contents), payload_rank++;
    }
    if (number == 2) data_type = (int64_t)value;
    if (number == 9) raw = contents;
    if (number == 14 && value == 1) end(UNSUPPORTED, "external data are not supported");
  }
  if (data_type != 2 || payload_rank != 1) end(REFUSED, "x must be UINT8 of rank 1");
  if (raw.end - raw.at != size) end(REFUSED, "the payload has the wrong length");

  float *y = malloc(elements * sizeof(float) + 1);
  if (!y) end(1, "out of memory");
  char symbol[64];
  snprintf(symbol, sizeof symbol, "dequantize_row_%s", FORMATS[f].function);
  void *library = dlopen(getenv("GGML_LIBRARY"), RTLD_NOW);
  void (*decode)(const void *, float *, int64_t) = library ? (void (*)(const void *, float *, int64_t))dlsym(library, symbol) : 0;
  if (!decode) end(1, "ggml's library, or its function, is missing");
  if (elements) decode(raw.at, y, elements);

  FILE *out = fopen(argv[2], "wb");
  if (!out) end(1, "cannot write the output");
  for (int d = 0; d < rank; d++) fputc(1 << 3, out), put_varint(out, (uint64_t)dims[d]);
  fputc(2 << 3, out), put_varint(out, 1);
  fputc(9 << 3 | 2, out), put_varint(out, (uint64_t)elements * sizeof(float));
  fwrite(y, sizeof(float), elements, out);
  return fclose(out) ? 1 : 0;
}
